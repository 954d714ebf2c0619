"""The operator catalogue: everything that plans, budgets, counts or reports asks it."""
