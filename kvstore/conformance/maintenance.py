"""MaintenanceConformance: the contract of kvstore.catalogue as tests.

An index passes if a subclass with one fixture and two methods passes, besides IndexConformance's:

    class TestMine(IndexConformance, MaintenanceConformance):
        @pytest.fixture
        def index(self): ...            an empty index, opened

        def reopen(self): ...           a second handle on the storage of `index`
        def configured(self, *, journal=None, cost_aware=True): ...     one with other settings
        def miscount(self, name, nbytes): ...       wrong its accounts behind its back

Where the maintenance is another object than the index, override the fixture `catalogue`.
"""

from kvstore.conformance.catalogue import CatalogueConformance
from kvstore.conformance.journal import JournalConformance
from kvstore.conformance.upkeep import UpkeepConformance


class MaintenanceConformance(CatalogueConformance, UpkeepConformance, JournalConformance):
    """Subclass it, name the subclass Test..., and give the fixture and the methods."""
