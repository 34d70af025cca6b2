"""Sign methods: send one bit per element."""
