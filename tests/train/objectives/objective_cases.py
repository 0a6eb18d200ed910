"""Every objective and option by name, each with its flat loss, for whole and partitioned trees."""

import tests.train.objectives.option_cases
import tests.train.objectives.sequence_cases
import tests.train.objectives.token_cases  # noqa: F401  (each fills CASES)
from tests.train.gradient.case import CASES as CASES
from tests.train.gradient.case import Case as Case
