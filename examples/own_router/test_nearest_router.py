"""Holds the router to the conformance of all routers."""

from nearest_router import NearestRouter

from lingvo_gshard import testing


class NearestRouterTest(testing.RouterTest):
    PARAMS = NearestRouter.params()
    STRATEGIES = (("expert_tensor", "data=4,model=2"),)
