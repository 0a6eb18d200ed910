"""Objectives: losses written for flat sequences, evaluated on branch views of a forest. One file per loss.

Denominators are in `treering.train.loss_weights`.
"""

from treering.train.objective import Entries as Entries
from treering.train.objective import Objective as Objective
from treering.train.objectives.distill import distill as distill
from treering.train.objectives.dpo import dpo as dpo
from treering.train.objectives.grpo import cispo as cispo
from treering.train.objectives.grpo import dapo as dapo
from treering.train.objectives.grpo import dr_grpo as dr_grpo
from treering.train.objectives.grpo import grpo as grpo
from treering.train.objectives.ppo import ppo as ppo
from treering.train.objectives.sequence_ratio import gspo as gspo
from treering.train.objectives.sequence_ratio import rloo as rloo
from treering.train.objectives.sft import sft as sft
