"""Lightning strategies: mixins with the logic, and thin classes for either Lightning package."""
