"""SimulatedDDP: simulate DDP of W workers on one device under Lightning."""
