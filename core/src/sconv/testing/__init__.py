"""What the tests of every backend share: digits, random steps, the oracle, a recorder.

A plugin's tests import this, so that a CUDA backend meets the same batches as the CPU's. Hypothesis
is needed by :mod:`sconv.testing.strategies` alone and torch by all of it; nothing in the library
imports this package.

* :mod:`~sconv.testing.digits`: inputs whose outputs read as decimal digits;
* :mod:`~sconv.testing.poison`: new memory is NaN instead of whatever was there;
* :mod:`~sconv.testing.recording`: capture and replay, on any device;
* :mod:`~sconv.testing.steps`: one step in plain numbers;
* :mod:`~sconv.testing.captures`: steps that are captured once and replayed with others;
* :mod:`~sconv.testing.comparison`: how close outputs and state must come;
* :mod:`~sconv.testing.expected`: what the oracle says of a step;
* :mod:`~sconv.testing.harness`: runs steps on a backend and on the oracle, and compares;
* :mod:`~sconv.testing.every_step`: steps of every kind, and all that comes out, to compare runs;
* :mod:`~sconv.testing.process`: settings of the process, which no result may depend on;
* :mod:`~sconv.testing.refusals`: every public call with every kind of bad argument;
* :mod:`~sconv.testing.strategies`: random specs and steps;
* :mod:`~sconv.testing.fuzzer`: thousands of random steps of one server, against lists of tokens;
* :mod:`~sconv.testing.state_faults`: faults of a scheduler that checked mode must find.
"""
