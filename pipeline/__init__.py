"""sparring: trains teams of agents that live in simulators it does not own.

The rooms, in the order of the flow: `simulation` (what a simulator author uses), `stepping`,
`assembly`, `coordination`, `learning`. What crosses between them is in `messages`, how it crosses
is in `queues`. Nothing is imported here, so that a simulator pays for nothing it does not use.
"""
