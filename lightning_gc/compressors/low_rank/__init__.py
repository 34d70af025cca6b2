"""Low-rank methods: send a matrix as thin factors."""
