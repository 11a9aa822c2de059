"""Relative RMS error that each format leaves on Gaussian weights.

python scripts/format_noise.py results/formats.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from setting import setting

from muster.formats.codec import decode, encode
from muster.formats.spec import FORMATS

SHAPE = (2048, 2048)
SEEDS = 5


def main() -> None:
    """Writes one JSON line per format."""
    with Path(sys.argv[1]).open("w") as lines:
        for format in FORMATS.values():
            errors = []
            for seed in range(SEEDS):
                weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
                errors.append(float((decode(encode(weight, format)) - weight).norm() / weight.norm()))
            record = {
                "format": format.name,
                "relative_rms": round(sum(errors) / SEEDS, 5),
                "shape": SHAPE,
                "seeds": SEEDS,
                **setting(),
            }
            lines.write(json.dumps(record) + "\n")
            print(json.dumps(record))


if __name__ == "__main__":
    main()
