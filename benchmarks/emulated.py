"""`surefoot check` on the emulated NPU, for every kind of model, in floats and in int8.

python benchmarks/emulated.py --tokens 5000 --jobs 2
python benchmarks/emulated.py --tokens 300 --only tiny-hybrid
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from measure import save

from surefoot.testing.tiny_dsa import GLM, TinyDsaSizes, write_tiny_dsa
from surefoot.testing.tiny_models import write_tiny

DENSE = "dense"
DSA = {
    "dsa": TinyDsaSizes(positions=4096),
    "dsa-once": TinyDsaSizes(architecture=GLM, every=2, one_choice=True, positions=4096),
}
MODELS = (DENSE, "tiny-hybrid", "tiny-dsv4", *DSA)
FORMS = ("floats", "w8a8", "w4a8")


def write_dense(folder: Path) -> list[str]:
    """A model of a size that the device takes, and one that drafts for it; flags that name them."""
    names = ("target", "draft")
    for name, drift in zip(names, (0.0, 0.08), strict=True):
        write_tiny(
            folder / name,
            "Qwen3ForCausalLM",
            tokenizer=True,
            hidden=64,
            inner=128,
            head_dim=128,
            drift=drift,
        )
    target, draft = (str(folder / name) for name in names)
    return [target, "--draft-model", draft]


def named(model: str, folder: Path) -> list[str]:
    """Flags that name a model; what is not packaged is written to the folder."""
    if model == DENSE:
        return write_dense(folder)
    if model in DSA:
        return [str(write_tiny_dsa(folder, DSA[model], tokenizer=True, dial=0.5))]
    return [model]


def check(model: str, form: str, options: argparse.Namespace) -> dict[str, object]:
    """What one check printed; one thread, as several of them run side by side."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--device", "npu", "--emulate", "--bitwise", "--json"]
        flags += ["--tokens", str(options.tokens), "--batch", options.batch]
        flags += ["--seed", str(options.seed)]
        if form != FORMS[0]:
            flags += ["--quantization", form]
        program = [sys.executable, "-c", "from surefoot.cli.main import main; main()"]
        done = subprocess.run(
            [*program, "check", *named(model, Path(folder)), *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if not done.stdout:
        raise SystemExit(f"check of {model} in {form}: {done.stderr}")
    result: dict[str, object] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--batch", default="1,3,6", help="sizes that fill no bucket to the brim")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=FORMS)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    print("model        form     tokens  partial  cached  pre-empted  differences  seconds")
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {
            pool.submit(check, model, form, options): (model, form)
            for model in options.only
            for form in options.forms
        }
        for run in as_completed(runs):
            (model, form), result = runs[run], run.result()
            cases = result.pop("cases")
            numbers = [
                result[key]
                for key in ("tokens_compared", "partial_accepts", "cache_hits", "preemptions")
            ]
            columns = "{:>8} {:>8} {:>7} {:>11}".format(*numbers)
            print(
                f"{model:12s} {form:6s} {columns} {result['differences']:>12} "
                f"{result['seconds']:>8}",
                flush=True,
            )
            save("emulated", {**result, "model": model, "form": form, "cases": len(list(cases))})


if __name__ == "__main__":
    main()
