"""What to do: memory model, cost model, search, Plan and its explanation. Imports program, simulate,
model.spec and machine; never torch."""
