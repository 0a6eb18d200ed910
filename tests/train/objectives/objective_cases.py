"""Every objective and option by name, each beside its flat loss: what whole and partitioned trees must pass."""

import tests.train.objectives.option_cases
import tests.train.objectives.sequence_cases
import tests.train.objectives.token_cases  # noqa: F401  (each fills CASES)
from tests.train.gradient.case import CASES as CASES
from tests.train.gradient.case import Case as Case
