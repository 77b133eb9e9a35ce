"""A sizing as a Kustomize component: resources, replicas and settings that go into any overlay."""

from __future__ import annotations

from antiphon.service.tools.capacity.sizing import Sizing

_COMPONENT = """\
# How large a replica is, from measurement: cores, memory, cache blocks. Made by a command that shows its reasoning
# (docs/CAPACITY.md); run it again instead of editing this file:
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
                # Requests equal limits: the pod is Guaranteed, and the last to be evicted.
                resources:
                  requests:
                    cpu: "{cores}"
                    memory: {memory}
                  limits:
                    cpu: "{cores}"
                    memory: {memory}
"""


def component(sizing: Sizing, command: str) -> str:
    """The component as YAML. command: what made it, for its reader."""
    literals = [f"      - ANTIPHON_{name.upper()}={value}" for name, value in sizing.settings.items()]
    replicas = f"\n        replicas: {sizing.replicas.planned}" if sizing.replicas is not None else ""
    return _COMPONENT.format(
        command=command, literals="\n".join(literals), replicas=replicas, cores=sizing.cores, memory=sizing.memory
    )
