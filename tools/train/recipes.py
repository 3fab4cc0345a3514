"""The models that are made here: their architectures, schedules and public configs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from tools.train.hybrid import HybridNetwork, HybridSizes
from tools.train.latent import LatentNetwork
from tools.train.latent_sizes import LatentSizes
from tools.train.network import Network
from tools.train.schedule import Schedule
from tools.train.text import END_ID


class Recipe(ABC):
    """How one model is made.

    Attributes:
        name: of the model and of its folder.
        model_type: of its config.json; no two recipes share one.
        architecture: the class that its config.json names.
        schedule: of its training, unless the command line says otherwise.
        longest: tokens of the longest context its config allows.
    """

    name: str
    model_type: str
    architecture: str
    schedule: Schedule
    longest: int

    @abstractmethod
    def make(self) -> Network:
        """A new network with random weights."""

    @abstractmethod
    def remake(self, config: Mapping[str, Any]) -> Network:
        """A network of the sizes that a config.json tells."""

    @abstractmethod
    def config(self, sizes: Mapping[str, Any]) -> dict[str, object]:
        """What is particular to the architecture in its config.json."""

    @abstractmethod
    def about(self, config: Mapping[str, Any]) -> dict[str, str]:
        """What the model card says of the architecture."""

    def whole_config(self, sizes: Mapping[str, Any]) -> dict[str, object]:
        """The config.json of a network of these sizes, a dict of its dataclass."""
        return self.config(sizes) | {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "max_position_embeddings": self.longest,
            "bos_token_id": END_ID,
            "eos_token_id": END_ID,
            "dtype": "bfloat16",
        }


class HybridRecipe(Recipe):
    """tiny-hybrid: Qwen3.5."""

    name, longest = "tiny-hybrid", 4096
    model_type, architecture = "qwen3_5_text", "Qwen3_5ForCausalLM"
    schedule = Schedule(steps=(750, 260, 400), batch=12, window=256)
    _KINDS: ClassVar = {"L": "linear_attention", "F": "full_attention"}

    def make(self) -> Network:
        """See Recipe."""
        return HybridNetwork(HybridSizes())

    def remake(self, config: Mapping[str, Any]) -> Network:
        """See Recipe."""
        letters = {kind: letter for letter, kind in self._KINDS.items()}
        rope = config["rope_parameters"]
        sizes = HybridSizes(
            **_known(HybridSizes, config),
            layers="".join(letters[kind] for kind in config["layer_types"]),
            rotary_dim=int(config["head_dim"] * rope["partial_rotary_factor"]),
            rope_theta=rope["rope_theta"],
        )
        return HybridNetwork(sizes)

    def config(self, sizes: Mapping[str, Any]) -> dict[str, object]:
        """See Recipe."""
        derived = ("layers", "rotary_dim", "rope_theta")
        plain = {name: value for name, value in sizes.items() if name not in derived}
        return plain | {
            "num_hidden_layers": len(sizes["layers"]),
            "layer_types": [self._KINDS[letter] for letter in sizes["layers"]],
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": sizes["rope_theta"],
                "partial_rotary_factor": sizes["rotary_dim"] / sizes["head_dim"],
            },
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "tie_word_embeddings": True,
            "mamba_ssm_dtype": "float32",
        }

    def about(self, config: Mapping[str, Any]) -> dict[str, str]:
        """See Recipe."""
        linear, full = (config["layer_types"].count(kind) for kind in self._KINDS.values())
        return {
            "name": self.name,
            "tags": "hybrid, gated-delta-rule",
            "kind": "a hybrid",
            "structure": f"Qwen3.5 architecture: layers with the gated delta rule ({linear}) "
            f"and with full attention ({full})",
        }


class LatentRecipe(Recipe):
    """tiny-dsv4: DeepSeek V4.

    Windows are long enough that entries of both ratios are read and that the indexer chooses.
    """

    name, longest = "tiny-dsv4", 32768
    model_type, architecture = "deepseek_v4", "DeepseekV4ForCausalLM"
    schedule = Schedule(steps=(640, 260), batch=6, window=512)

    def make(self) -> Network:
        """See Recipe."""
        return LatentNetwork(LatentSizes())

    def remake(self, config: Mapping[str, Any]) -> Network:
        """See Recipe."""
        # The draft head has a ratio too, behind those of the layers.
        ratios = tuple(config["compress_ratios"][: config["num_hidden_layers"]])
        known = _known(LatentSizes, config) | {"compress_ratios": ratios}
        return LatentNetwork(LatentSizes(**known))

    def config(self, sizes: Mapping[str, Any]) -> dict[str, object]:
        """See Recipe."""
        ratios = list(sizes["compress_ratios"])
        return dict(sizes) | {
            "num_hidden_layers": len(ratios),
            "compress_ratios": [*ratios, 0],
            "num_key_value_heads": 1,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 1,
            "scoring_func": "sqrtsoftplus",
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
        }

    def about(self, config: Mapping[str, Any]) -> dict[str, str]:
        """See Recipe."""
        ratios = config["compress_ratios"][: config["num_hidden_layers"]]
        return {
            "name": self.name,
            "tags": "compressed-attention, mixture-of-experts",
            "kind": "compressed caches",
            "structure": "DeepSeek V4 architecture: hyper-connections, "
            f"{config['n_routed_experts']} experts, layers that see a window of "
            f"{config['sliding_window']} tokens ({ratios.count(0)}), also the "
            f"{config['index_topk']} entries of 4 tokens each that an indexer chooses "
            f"({ratios.count(4)}), or all entries of 128 tokens each ({ratios.count(128)})",
        }


def _known(sizes: type[HybridSizes | LatentSizes], config: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(sizes)}
    return {name: value for name, value in config.items() if name in names}


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (HybridRecipe(), LatentRecipe())}


def find_recipe(config: Mapping[str, Any]) -> Recipe:
    """The recipe that a config.json is of."""
    for recipe in RECIPES.values():
        if recipe.model_type == config["model_type"]:
            return recipe
    raise ValueError(f"no recipe makes models of type {config['model_type']!r}")
