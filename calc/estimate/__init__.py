"""From a scenario to its answer: GPU groups, host nodes, verdict."""
