"""The plan as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from muster.plan import Plan


def plan_document(plan: Plan) -> dict[str, Any]:
    """Every part with what runs it for which token counts, on what evidence, and why each other backend lost."""
    return {
        "object": "muster.plan",
        "proven": plan.proven,
        "parts": [
            {"role": role, "problem": _problem(problem), **asdict(choice), "proven": choice.proven}
            for (role, problem), choice in plan.choices.items()
        ],
        "remarks": plan.remarks,
    }


def _problem(problem: Any) -> dict[str, Any]:
    """The shapes and formats of a problem."""
    fields = asdict(problem)
    return {**fields, "weights": fields["weights"].get("name", str(problem.weights))}
