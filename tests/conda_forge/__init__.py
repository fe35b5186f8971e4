"""conda-forge as the tests know it, and the clients that are pointed at it: a model of its records, real pixi and conda."""
