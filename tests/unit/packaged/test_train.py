"""The training that makes the packaged model: its text, its mathematics and its resumption."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.train import evaluate, text
from tools.train.card import count_parameters, write_card
from tools.train.delta import gated_delta
from tools.train.evaluate import Written, accept_length, evaluate_folder
from tools.train.export import export_folder
from tools.train.hybrid import DraftHead, FullBlock, HybridNetwork, HybridSizes, angles
from tools.train.loop import Pace, Training
from tools.train.optimiser import orthogonalise
from tools.train.recipes import RECIPES
from tools.train.schedule import Schedule
from tools.train_tiny import MODELS, build_parser, choose_schedule

RECIPE = RECIPES["tiny-hybrid"]
SIZES = HybridSizes(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=64,
    layers="LF",
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rotary_dim=4,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
)


def make() -> HybridNetwork:
    return HybridNetwork(SIZES)


SCHEDULE = Schedule(steps=(12, 8), batch=2, window=64, warmup=2)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    (root / "LICENSE.txt").write_text("You may.")
    for number in range(40):
        body = "".join(f"def f{i}(x):\n    return x + {i * number}\n" for i in range(30))
        (root / f"m{number}.py").write_text(f"# Copyright {number} somebody\n# Free.\n\n{body}")
    for skipped in ("test/a.py", "encodings/b.py", "ensurepip/_bundled/c.py"):
        (root / skipped).parent.mkdir(parents=True)
        (root / skipped).write_text("must not be read " * 40)
    to = root / "prepared"
    text.prepare(root, to, seed=0, vocabulary=SIZES.vocab_size)
    return to


def train(folder: Path, prepared: Path, stop_after: int = 0, seed: int = 0) -> Training:
    schedule = replace(SCHEDULE, seed=seed)
    training = Training(folder, text.load(prepared), make, schedule, lambda _line: None)
    pace = Pace(compiled=False, save_every=5, measure_every=100, stop_after=stop_after)
    assert training.run(pace) == (stop_after == 0)
    return training


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return train(tmp_path_factory.mktemp("run"), prepared)


def test_the_text_is_split_by_files(prepared: Path) -> None:
    sources = text.read_sources(prepared / "sources.json")
    assert [source.path for source in sources] == sorted(f"m{i}.py" for i in range(40))
    kept_back = [source for source in sources if source.held_out]
    corpus = text.load(prepared)
    assert len(kept_back) == len(corpus.held_out) == 2
    assert corpus.held_out_bytes == sum(source.size for source in kept_back)
    assert int((corpus.train == text.END_ID).sum()) == 38


def test_notices_are_whole() -> None:
    found = text.find_notices("x = 1\n# Copyright (c) me\n#\n# Keep this.\ny = 2\nlicensed to z\n")
    assert found[0] == "# Copyright (c) me\n#\n# Keep this."


def test_windows_cover_the_text_once_a_turn() -> None:
    schedule = Schedule(steps=(10,), batch=2, window=4)
    ids = np.arange(44, dtype=np.int32)
    turns = [[schedule.windows(ids, 1, turn * 5 + step) for step in range(5)] for turn in range(2)]
    for turn in turns:
        tokens = torch.cat(turn).flatten().sort().values
        assert len(tokens.unique()) == 40
    assert not torch.equal(torch.cat(turns[0]), torch.cat(turns[1]))
    with pytest.raises(ValueError, match="too few for batches of 2 windows of 4"):
        schedule.windows(ids[:8], 1, 0)


def test_rates_rise_hold_and_fall() -> None:
    schedule = Schedule(steps=(100, 10), batch=2, window=4, warmup=4, hold=0.5)
    assert [schedule.scale(1, step) for step in (0, 3, 50, 75)] == [0.25, 1.0, 1.0, 0.5]
    assert schedule.scale(2, 5) == 0.5


def recurrent(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write: Tensor) -> Tensor:
    group = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(group, dim=2) for x in (query, key))
    state = query.new_zeros(*value.shape[::2], key.shape[-1], value.shape[-1])
    read = []
    for t in range(query.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        known = (state * key[:, t, :, :, None]).sum(-2)
        fresh = (value[:, t] - known) * write[:, t, :, None]
        state = state + key[:, t, :, :, None] * fresh[..., None, :]
        read.append((state * query[:, t, :, :, None]).sum(-2) * key.shape[-1] ** -0.5)
    return torch.stack(read, 1)


def test_chunks_and_their_gradients_equal_the_recurrence() -> None:
    torch.manual_seed(0)
    parts = [torch.nn.functional.normalize(torch.randn(2, 130, 2, 16), dim=-1) for _ in range(2)]
    parts += [torch.randn(2, 130, 4, 8), -torch.rand(2, 130, 4), torch.rand(2, 130, 4)]
    weights = torch.randn(2, 130, 4, 8)
    results = []
    for form in (gated_delta, recurrent):
        inputs = [part.clone().requires_grad_() for part in parts]
        read = form(*inputs)
        results.append([read, *torch.autograd.grad((read * weights).sum(), inputs)])
    for chunked, stepped in zip(*results, strict=True):
        torch.testing.assert_close(chunked, stepped, rtol=1e-4, atol=1e-4)


def draft_one_by_one(
    head: DraftHead, network: HybridNetwork, ids: Tensor, row: int
) -> list[Tensor]:
    """Drafts of one row as an engine makes them: a growing sequence of inputs to the layer."""
    embedded, hidden = network.model.embed_tokens(ids), network.hidden(ids)
    inputs = torch.cat(
        [
            head.pre_fc_norm_embedding(embedded[:, 1 : row + 2]),
            head.pre_fc_norm_hidden(hidden[:, : row + 1]),
        ],
        -1,
    )
    layer = head.layers[0]
    assert isinstance(layer, FullBlock)
    states: list[Tensor] = []
    for depth in range(1, 4):
        rows = head.fc(inputs)
        states.append(head.norm(layer(rows, angles(network.sizes, 0, rows.shape[1]))[:, -1]))
        token = row + depth + 1
        further = [
            head.pre_fc_norm_embedding(embedded[:, token : token + 1]),
            head.pre_fc_norm_hidden(states[-1][:, None]),
        ]
        inputs = torch.cat([inputs, torch.cat(further, -1)], 1)
    return states


def test_drafts_of_all_rows_at_once_equal_drafts_one_by_one() -> None:
    torch.manual_seed(1)
    network = make()
    ids = torch.randint(SIZES.vocab_size, (2, 24))
    with torch.no_grad():
        at_once = network.drafts(ids, network.hidden(ids), 3)
        for row in (0, 5, 19):
            for depth, state in enumerate(draft_one_by_one(network.mtp, network, ids, row)):
                torch.testing.assert_close(at_once[depth][:, row], state, rtol=1e-4, atol=1e-5)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(2, 48, 16)))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.4


def test_training_learns(trained: Training) -> None:
    losses = [entry["loss"] for entry in trained.progress.trace]
    assert len(losses) == 2
    assert isinstance(losses[0], float)
    assert losses[0] < 5.0  # log 300 = 5.7
    assert losses[0] == losses[1], "phase 2 must leave the trunk alone"


def test_a_stopped_run_goes_on_to_the_same_bits(
    trained: Training, prepared: Path, tmp_path: Path
) -> None:
    for stop_after in (7, 15):
        train(tmp_path, prepared, stop_after)
    resumed = train(tmp_path, prepared)
    assert resumed.progress.trace == trained.progress.trace
    whole, parts = trained.network.state_dict(), resumed.network.state_dict()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_steps_may_change_while_no_rate_has() -> None:
    schedule = Schedule(steps=(100, 20), batch=2, window=4, hold=0.5)
    longer, head = replace(schedule, steps=(200, 20)), replace(schedule, steps=(100, 30))
    assert schedule.agrees(schedule, 2, 19)
    assert schedule.agrees(longer, 1, 50)
    assert longer.agrees(schedule, 1, 50)
    assert not longer.agrees(schedule, 1, 51)
    assert not schedule.agrees(longer, 2, 0)
    assert schedule.agrees(head, 1, 99)
    assert schedule.agrees(head, 2, 0)
    assert not schedule.agrees(head, 2, 1)
    assert schedule.agrees(replace(schedule, steps=(100, 20, 5)), 3, 0)
    assert not schedule.agrees(replace(schedule, steps=(100,)), 3, 0)
    assert not schedule.agrees(replace(schedule, seed=1), 1, 0)
    rates = [[plan.scale(1, step) for step in range(51)] for plan in (schedule, longer)]
    assert rates[0] == rates[1]


def test_a_finished_run_takes_a_further_round_of_the_head(
    trained: Training, prepared: Path, tmp_path: Path
) -> None:
    shutil.copyfile(trained.folder / "checkpoint.pt", tmp_path / "checkpoint.pt")
    schedule = replace(SCHEDULE, steps=(*SCHEDULE.steps, 4))
    training = Training(tmp_path, text.load(prepared), make, schedule, lambda _line: None)
    assert training.run(Pace(compiled=False))
    before, after = trained.network.state_dict(), training.network.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("mtp.") for name in changed)
    assert len(training.progress.seconds) == 3


def test_a_checkpoint_of_another_schedule_is_refused(prepared: Path, tmp_path: Path) -> None:
    train(tmp_path, prepared, stop_after=1)
    with pytest.raises(ValueError, match="give the same options or another folder"):
        train(tmp_path, prepared, seed=1)


def test_an_unfinished_run_is_not_exported(prepared: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", prepared, stop_after=1)
    with pytest.raises(ValueError, match="go on with `train` first"):
        export_folder(tmp_path / "run", prepared, tmp_path / "out", RECIPE)


def test_a_finished_run_becomes_a_folder_with_a_card(
    trained: Training, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "PROMPTS", 2)
    monkeypatch.setattr(evaluate, "NEW_TOKENS", 64)
    export_folder(trained.folder, prepared, tmp_path, RECIPE)
    evaluate_folder(tmp_path, prepared, lambda _line: None)
    write_card(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == trained.network.state_dict().keys()
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert 1.0 <= measured["greedy"]["accept_length"]["3"] <= 4.0
    assert "$" not in (tmp_path / "README.md").read_text()


def test_parameters_are_the_numbers_that_were_trained(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 5).bfloat16(), "b": torch.zeros(7), "table": torch.arange(11)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert count_parameters(tmp_path) == 3 * 5 + 7


def test_every_recipe_is_offered() -> None:
    assert set(MODELS) == set(RECIPES)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_by_its_own_schedule_unless_told(name: str) -> None:
    own = RECIPES[name].schedule

    def chosen(*options: str) -> Schedule:
        parsed = build_parser().parse_args(["train", "--model", name, *options])
        return choose_schedule(parsed, own)

    assert chosen() == own
    assert chosen("--steps", "7") == replace(own, steps=(7, *own.steps[1:]))
    assert chosen("--head-steps", "8", "9") == replace(own, steps=(own.steps[0], 8, 9))
    assert chosen("--batch", "3", "--seed", "5") == replace(own, batch=3, seed=5)


def test_accept_lengths_follow_the_passes() -> None:
    right = np.zeros((3, 1, 12), dtype=bool)
    assert accept_length(right, 3) == 1.0
    assert accept_length(~right, 3) == 4.0
    # The pass at 1 accepts depth 1 at 1 and depth 2 at 2; the one at 4 accepts nothing.
    right[0, 0, 1] = right[1, 0, 2] = True
    assert accept_length(right[:, :, :8], 3) == (3 + 1) / 2


def test_drafts_are_compared_with_the_tokens_they_foretell() -> None:
    torch.manual_seed(2)
    network = make()
    ids = torch.randint(SIZES.vocab_size, (1, 20))
    with torch.no_grad():
        states = network.drafts(ids, network.hidden(ids), 3)
    # Token 15 becomes what depth 2 foretells for it, whose row saw tokens up to 14 only.
    ids[0, 15] = network.logits(states[1][0, 12]).argmax()
    written = Written(ids, torch.zeros(1, 12, SIZES.vocab_size), 1.0)
    assert evaluate.drafts_right(network, written, 8)[1, 0, 15 - 8]


def test_repetition_and_recitation_are_counted() -> None:
    row = np.array([[1, 2, 3, 4, 1, 2, 3, 5]], dtype=np.int32)
    assert evaluate.repetition_share(row, prompt=4, window=3) == 1 / 4
    corpus = np.array([9, 2, 3, 4, 9], dtype=np.int32)
    assert evaluate.recitation_share(row, corpus, 3) == 1 / 6
