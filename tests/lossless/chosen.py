"""Small models that attend to chosen positions, by name."""

from collections.abc import Mapping

from surefoot.testing.tiny_dsa import GLM, TinyDsaSizes

# Positions go far beyond eight times those that a token looks at.
CHOSEN: Mapping[str, TinyDsaSizes] = {
    "chosen": TinyDsaSizes(layers=2, heads=2, index_chosen=6),
    "chosen once": TinyDsaSizes(
        architecture=GLM, layers=2, heads=2, index_chosen=6, every=2, one_choice=True
    ),
}
