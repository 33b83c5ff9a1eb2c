"""Queues with exact backpressure and boards on which the latest wins, over memory and over ZeroMQ.

`interface` is what stages see; `credit` and `topic` are the rules without any I/O; `memory` and
`zmq` carry them. Import the transport you need from its module: this package loads none.
"""
