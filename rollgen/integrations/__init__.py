"""Trainers of other libraries on stored rollouts, one module each: imported by name, for each needs its library."""
