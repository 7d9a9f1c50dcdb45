"""MaintenanceConformance: the contract of kvstore.index.maintenance.Maintenance as tests."""

from kvstore.conformance.index.catalogue import CatalogueConformance
from kvstore.conformance.index.culling import CullConformance
from kvstore.conformance.index.invalidation import InvalidationConformance


class MaintenanceConformance(CatalogueConformance, CullConformance, InvalidationConformance):
    """The suite of Maintenance, which every index offers. If the maintenance is another object than the
    index, override the fixture `catalogue`."""
