"""Exchange gradients of models in shards: HSDP's replicas and FSDP2's reduce-scatter."""
