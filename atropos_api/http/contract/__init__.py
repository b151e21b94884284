"""Every route as data: what it takes, answers and refuses.

The OpenAPI document, `/docs` and the reference follow from it. Handlers read requests themselves, for speed; tests hold
these tables against the routes, and against what the routes really answer.
"""

from typing import Final

from atropos_api.http.contract.legacy import LEGACY
from atropos_api.http.contract.pieces import Answer, Operation, Parameter, Schema
from atropos_api.http.contract.v1 import V1
from atropos_api.http.contract.watching import WATCHING

SECTIONS: Final = {"v1": V1, "Atropos contract": LEGACY, "operations": WATCHING}

__all__ = ["SECTIONS", "Answer", "Operation", "Parameter", "Schema"]
