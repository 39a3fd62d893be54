"""A parameter server in torch's point to point, synchronous or with bounded staleness."""

from parameter_server.clocks import Clocks
from parameter_server.server import ParameterServer, PsWorker, Report

__all__ = ["Clocks", "ParameterServer", "PsWorker", "Report"]
