"""Policy improvement: trajectories, rewards, advantages, rollouts. The only room where engine and trainer meet."""
