"""What it runs on: platform files, live measurement, collective cost models, and the MT-3000 operator
backend. Constants of the real world live in platforms/*.toml, never in code."""
