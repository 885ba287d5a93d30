"""From the layout of training to that of sampling: the same numbers, and no second copy on the way."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.distributed.reshard import make_reshard
from jaxrl_llm.models.decoder import make_policy
from tests.models_for_tests import small_config


def test_values_layout_and_memory():
    config = small_config(num_layers=8, hidden_size=64, intermediate_size=256, head_dim=16, num_kv_heads=4)
    params = make_policy(config).init(jax.random.key(0))
    before, after = (meshes.parse_mesh(spec) for spec in ("fsdp=8", "data=4,tensor=2"))
    wanted = rules.shardings(params, after)
    placed = rules.shard(params, before)
    program = jax.jit(make_reshard(wanted, jnp.bfloat16), out_shardings=wanted).lower(placed).compile()
    out = program(placed)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), out, wanted))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), out, params)
    memory = program.memory_analysis()
    layer = sum(x.nbytes for x in jax.tree.leaves(params["layers"])) // config.num_layers
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    # beside arguments and results a layer or two, far from the whole model in either precision
    assert memory.temp_size_in_bytes < 3 * layer < whole // 2, (memory.temp_size_in_bytes, layer, whole)
