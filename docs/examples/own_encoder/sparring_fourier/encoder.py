"""The encoder's network: sines and cosines of learned frequencies."""

import torch
from torch import nn

from sparring.pipeline.networks.perceptron import linear


class FourierEncoder(nn.Module):
    def __init__(self, size, units, scale, generator):
        super().__init__()
        self.phases = linear(size, units // 2, scale, generator)

    def forward(self, vector):
        phases = self.phases(vector)
        return torch.cat((phases.sin(), phases.cos()), 1)

    def onnx(self, graph, vector):
        """Adds the same to an exported model."""
        weight, bias = graph.constant(self.phases.weight), graph.constant(self.phases.bias)
        phases = graph.add("Gemm", vector, weight, bias, transB=1)
        return graph.add("Concat", graph.add("Sin", phases), graph.add("Cos", phases), axis=1)
