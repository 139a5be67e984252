"""The forecast: an event engine over the program, with link contention. Imports program; never torch,
never runtime."""
