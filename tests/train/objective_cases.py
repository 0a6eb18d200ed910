"""Every objective and option by name, each beside its flat loss: what whole and partitioned trees must pass."""

import tests.train.option_cases
import tests.train.sequence_cases
import tests.train.token_cases  # noqa: F401  (each fills CASES)
from tests.train.case import CASES as CASES
from tests.train.case import Case as Case
