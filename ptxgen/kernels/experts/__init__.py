"""Kernels of mixtures of experts: a router chooses a few networks for each row.

    select_experts      logits of the router to experts and their weights
    route_experts       the same with norm and product of the router, for few rows
    router_logits       logits alone, of many rows
    experts_up          the first matrices of the chosen experts and the activation, for few rows
    experts_down        their last matrices, weighted and added to the residual, for few rows
    experts_gemm_small  both, for few rows; rows with the same expert read its weights once
    group_experts       pairs of rows and experts, sorted by expert, for many rows
    experts_gemm        the matrices of experts times many rows, on f16 tensor cores
    place_experts       which slots of a cache the chosen experts have or get
    fetch_experts       those that are missing, copied to their slots
    settle_experts      caches after products of one row have looked up what it chose themselves
    combine_experts     the results of a row's experts, added up

The matrices of all experts of a layer are one, experts * rows high, so that an expert is a row
offset. Everything that depends on the choice is read on the device: a graph needs no host.
"""
