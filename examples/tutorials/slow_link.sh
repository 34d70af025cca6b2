#!/usr/bin/env bash
# Two workers in network namespaces of their own, joined by a link of RATE, 100 Mbit/s by default.
# As root, on Linux with iproute2: bash examples/tutorials/slow_link.sh identity cast qsgd topk
# RATE=10mbit PROGRAM=two_sites.py bash examples/tutorials/slow_link.sh ddp qsgd-8
set -euo pipefail
cd "$(dirname "$0")"
trap 'ip netns del gc-worker0; ip netns del gc-worker1' EXIT
for i in 0 1; do ip netns add gc-worker$i; done
ip -n gc-worker0 link add gc0 type veth peer name gc0 netns gc-worker1
for i in 0 1; do
  ip -n gc-worker$i addr add 10.77.1.1$i/24 dev gc0
  ip -n gc-worker$i link set gc0 up
  ip -n gc-worker$i link set lo up
  tc -n gc-worker$i qdisc add dev gc0 root tbf rate ${RATE:-100mbit} burst 128kb latency 200ms
done
export GLOO_SOCKET_IFNAME=gc0 OMP_NUM_THREADS=1
worker() { # number, compressor or method
  ip netns exec gc-worker$1 torchrun --nnodes 2 --node-rank $1 --master-addr 10.77.1.10 \
    ${PROGRAM:-two_workers.py} $2 --nodes 2
}
for compressor in "$@"; do
  worker 1 $compressor &
  worker 0 $compressor
  wait
done
