"""The schedule: actions, layout, program, timeline, 1F1B order, lifecycle passes, dependencies, checker.
Imports nothing else of ratrain, and never torch: planning and simulation read it on a laptop."""
