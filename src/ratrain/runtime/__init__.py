"""Doing it: launch, mesh, unit state, executor, collectives, optimizer, checkpoint, trainer. Imports
program, model and data; never simulate."""
