"""The MT-3000 operator backend: explicit memory hierarchy, tile schedules, a functional executor and a
cost model that read the same schedule."""
