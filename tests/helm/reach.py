"""Who may connect to whom by the NetworkPolicies of a render: Kubernetes' rules, without a cluster.

A pod that no policy of a direction selects may do anything in that direction; of those that select it, one
rule that lets the connection pass is enough. A connection needs both: the source's egress and the target's
ingress.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.helm.chart import Manifest

Rule = Mapping[str, Any]


@dataclass(frozen=True)
class End:
    """A pod with its labels, or an address outside of the cluster."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    #: Of an address outside; pods have none here, as rules by address don't stand for pods.
    address: str = ""


class Reach:
    """The policies of one namespace."""

    def __init__(self, manifests: Iterable[Manifest], namespace: str) -> None:
        self._namespace = namespace
        self._policies = [one["spec"] for one in manifests if one["kind"] == "NetworkPolicy"]

    def may(self, source: End, target: End, port: int, protocol: str = "TCP") -> bool:
        """Whether `source` may open a connection to that port of `target`."""
        return self._passes("Egress", source, target, port, protocol) and self._passes(
            "Ingress", target, source, port, protocol
        )

    def _passes(self, direction: str, of: End, other: End, port: int, protocol: str) -> bool:
        policies = [
            policy
            for policy in self._policies
            if direction in _types(policy)
            and not of.address
            and of.namespace == self._namespace
            and selects(policy["podSelector"], of.labels)
        ]
        if not policies:
            return True
        rules = [rule for policy in policies for rule in policy.get(direction.lower()) or []]
        return any(self._allows(rule, direction, other, port, protocol) for rule in rules)

    def _allows(self, rule: Rule, direction: str, other: End, port: int, protocol: str) -> bool:
        peers = rule.get("from" if direction == "Ingress" else "to")
        ports = rule.get("ports")
        there = not peers or any(self._is(peer, other) for peer in peers)
        return there and (not ports or any(_is_port(one, port, protocol) for one in ports))

    def _is(self, peer: Rule, end: End) -> bool:
        if "ipBlock" in peer:
            block = peer["ipBlock"]
            return (
                bool(end.address)
                and _within(end.address, block["cidr"])
                and not any(_within(end.address, cidr) for cidr in block.get("except", ()))
            )
        if end.address:
            return False
        if "namespaceSelector" in peer:
            known = {"kubernetes.io/metadata.name": end.namespace, **end.namespace_labels}
            here = selects(peer["namespaceSelector"], known)
        else:
            here = end.namespace == self._namespace
        return here and selects(peer.get("podSelector") or {}, end.labels)


def _types(policy: Rule) -> list[str]:
    return list(policy.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in policy else [])])


def _within(address: str, cidr: str) -> bool:
    one, block = ipaddress.ip_address(address), ipaddress.ip_network(cidr)
    return bool(one.version == block.version and one in block)


def _is_port(one: Rule, port: int, protocol: str) -> bool:
    if one.get("protocol", "TCP") != protocol:
        return False
    if "port" not in one:
        return True
    assert isinstance(one["port"], int), "a port by name is another one in each pod"
    return int(one["port"]) <= port <= int(one.get("endPort", one["port"]))


def selects(selector: Rule, labels: Mapping[str, str]) -> bool:
    """Whether a label selector chooses these labels; an empty one chooses all."""
    if not (selector.get("matchLabels") or {}).items() <= labels.items():
        return False
    return all(_holds(one, labels) for one in selector.get("matchExpressions") or ())


def _holds(one: Rule, labels: Mapping[str, str]) -> bool:
    value, operator = labels.get(one["key"]), str(one["operator"])
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    assert operator in ("In", "NotIn"), operator
    return bool(value in one["values"]) == (operator == "In")
