"""The way of one call: request, plan, execution, gradients, compiled graphs."""
