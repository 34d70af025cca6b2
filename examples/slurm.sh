#!/bin/bash
# Two machines of four GPUs: sbatch examples/slurm.sh
#SBATCH --job-name=compressed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=SIGUSR1@120
# Lightning saves a checkpoint at SIGUSR1, two minutes before the end, and requeues the job.

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# Of Gloo and NCCL: the interface of the network between machines. See "ip -brief address".
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

# As many tasks as workers: one process a GPU. Lightning reads rank and address from SLURM_*.
srun python examples/cluster.py \
    --nodes "$SLURM_JOB_NUM_NODES" --devices "$SLURM_NTASKS_PER_NODE" --folder "$HOME/runs/cluster"
