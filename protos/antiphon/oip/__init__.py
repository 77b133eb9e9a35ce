"""Generated stubs of the Open Inference Protocol v2, from `inference.proto`. Imports nothing by itself.

The messages are registered as `inference.*`, as the standard names them: a process that loads these stubs cannot load
those of tritonclient or kserve beside them. The client of Antiphon does not load them.
"""
