"""The package provides queues with exact backpressure, and retained topics, over memory and over ZeroMQ.

`interface` is what stages see; `sending`, `receiving` and `topic` hold the rules without I/O; `memory` and
`zmq` carry them. Import the transport you need from its module: this package loads none.
"""
