#!/bin/sh
# Removes from the packages of an image what no server imports, and compiles the rest. Run by deploy/Dockerfile, in
# site-packages. tests/deploy/test_image_contents.py starts and asks a server without all of it.
set -eu
# Envoy's messages beside the two of ORCA, ONNX Runtime's tools for making models, Fortran compilers of NumPy.
xargs rm -r < "$(dirname "$0")/prune.txt"
# ONNX Runtime for programs in C: Python's module has the same inside.
rm -f onnxruntime/capi/libonnxruntime.so.*
find numpy -depth -type d -name tests -exec rm -r {} +
# Published with symbols for debuggers, which are more than half of them.
strip --strip-unneeded uvloop/*.so tokenizers/*.so
# For compilers and type checkers.
find . -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.proto' -o -name '*.a' -o -name '*.h' \) -delete
# Bytecode now: a read-only root has no place for it later. Never compared with its source, which never changes either.
python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash .
