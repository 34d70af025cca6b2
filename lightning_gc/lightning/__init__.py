"""Lightning strategies, Fabric strategy, simulated workers and the monitor."""
