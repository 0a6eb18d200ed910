"""A run on two Ray nodes, one of which dies: `python -m tests.integrations.ray.two_nodes` prints the outcome."""

import json

import ray
from ray.cluster_utils import Cluster

from tests.runtime.runs import pipeline
from tests.runtime.test_pipeline import rows_of
from treering.runtime.ray_actors import RayActors

NUM_STEPS = 4

if __name__ == "__main__":
    # Three actors take a CPU each, so at least one does not fit on the first node.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    second = cluster.add_node(num_cpus=3)
    ray.init(address=cluster.address, logging_level="warning")
    rows = []
    with pipeline(num_steps=NUM_STEPS, staleness=1, actors=RayActors(num_rollout_workers=2)) as loop:
        for step in range(NUM_STEPS):
            if step == 1:
                cluster.remove_node(second, allow_graceful=False)
                cluster.add_node(num_cpus=3)
            loop.step()
            rows.append([row[2] for row in rows_of(loop)])
        account = loop.account.as_dict()
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps({"rows": rows, "account": account}))
