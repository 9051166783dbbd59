"""Writing conversations: the sampler, the play of policy and user, the users that need no model."""
