"""Sizing as a Kustomize component: resources, replicas and settings for any overlay."""

from __future__ import annotations

from antiphon.tools.capacity.sizing.sizing import Sizing

_COMPONENT = """\
# Size of a replica, from measurements: cores, memory, cache blocks. Made by a command that prints its formulas
# (docs/CAPACITY.md). Run it again instead of editing this file:
#   {command}
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component

configMapGenerator:
  - name: antiphon
    namespace: antiphon
    behavior: merge
    literals:
{literals}

patches:
  - target:
      kind: Deployment
      name: antiphon
    patch: |-
      apiVersion: apps/v1
      kind: Deployment
      metadata:
        name: antiphon
      spec:{replicas}
        template:
          spec:
            containers:
              - name: antiphon
                # Requests equal limits, so that the pod has the class Guaranteed and is evicted last.
                resources:
                  requests:
                    cpu: "{cores}"
                    memory: {memory}
                  limits:
                    cpu: "{cores}"
                    memory: {memory}
"""


def component(sizing: Sizing, command: str) -> str:
    """Return the component as YAML. command: the command line that made it, for a comment."""
    literals = [f"      - ANTIPHON_{name.upper()}={value}" for name, value in sizing.settings.items()]
    replicas = f"\n        replicas: {sizing.replicas.planned}" if sizing.replicas is not None else ""
    return _COMPONENT.format(
        command=command, literals="\n".join(literals), replicas=replicas, cores=sizing.cores, memory=sizing.memory
    )
