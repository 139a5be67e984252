"""The paper's tables beside ours: rows are data, every number says how it was come by. Nothing here prints or
draws."""
