"""A fleet in a box: light engines over a real Redis Cluster and a real S3 server, on one machine.

__main__    the run and its report: python -m tools.fleet
engine      the engines: what a connector asks of the store, and no model
servers     the Cluster of six nodes, and what servers tell of themselves
"""
