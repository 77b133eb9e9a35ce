#!/bin/sh
# Removes parts of an image's packages that no server imports, and compiles the rest. deploy/Dockerfile runs it in
# site-packages. tests/deploy/test_image_contents.py starts a server without these parts and sends it requests.
set -eu
# Envoy's messages except the two of ORCA, ONNX Runtime's tools to make models, NumPy's support for Fortran compilers.
xargs rm -r < "$(dirname "$0")/prune.txt"
# ONNX Runtime for C programs: the Python module contains the same code.
rm -f onnxruntime/capi/libonnxruntime.so.*
find numpy -depth -type d -name tests -exec rm -r {} +
# These are published with debug symbols, more than half of their size.
strip --strip-unneeded uvloop/*.so tokenizers/*.so
# Files for compilers and type checkers.
find . -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.proto' -o -name '*.a' -o -name '*.h' \) -delete
# Compiled now, because a read-only root has no place for bytecode later. It is never compared with its source, which
# does not change.
python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash .
