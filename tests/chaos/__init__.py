"""Fault-injection tests: training with kills, disk faults and NaN must give the results of a run without faults."""
