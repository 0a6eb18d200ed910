"""A run on two Ray nodes of which one dies: `python -m tests.integrations.ray.two_nodes` prints what became of it."""

import json

import ray
from ray.cluster_utils import Cluster

from tests.runtime.runs import pipeline
from tests.runtime.test_pipeline import rows_of
from treering.runtime.ray_actors import RayActors

NUM_STEPS = 4

if __name__ == "__main__":
    # One of three actors that take a CPU, at least, has no room on the first node.
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
