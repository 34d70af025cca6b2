#!/usr/bin/env bash
# Three sites in network namespaces of their own. The link of site 2 is down for a while.
# As root, on Linux with iproute2: bash examples/tutorials/three_sites.sh
set -euo pipefail
cd "$(dirname "$0")"
roll=$(mktemp)
export SECRET=$(openssl rand -base64 32)
trap 'kill $(jobs -p) 2> /dev/null || true; for s in site0 site1 site2 hub; do ip netns del gc-$s; done' EXIT
for space in site0 site1 site2 hub; do ip netns add gc-$space; done
ip -n gc-hub link add bridge0 up type bridge
for i in 0 1 2; do
  ip -n gc-site$i link add gc0 type veth peer name port$i netns gc-hub
  ip -n gc-hub link set port$i master bridge0 up
  ip -n gc-site$i addr add 10.77.2.1$i/24 dev gc0
  ip -n gc-site$i link set gc0 up
  ip -n gc-site$i link set lo up
  tc -n gc-site$i qdisc add dev gc0 root tbf rate ${RATE:-10mbit} burst 128kb latency 200ms
done
export GLOO_SOCKET_IFNAME=gc0 OMP_NUM_THREADS=1
ip netns exec gc-site0 python -m lightning_gc rendezvous --roll $roll --secret-file <(echo $SECRET) &
rendezvous=$!
sites=()
for i in 0 1 2; do
  ip netns exec gc-site$i python three_sites.py --site $i &
  sites+=($!)
done
until [ "$(wc -l < $roll)" -ge 10 ]; do sleep 0.2; done
ip -n gc-hub link set port2 down
echo "the link of site 2 is down"
until [ "$(wc -l < $roll)" -ge 25 ]; do sleep 0.2; done
ip -n gc-hub link set port2 up
echo "the link of site 2 is up again"
wait "${sites[@]}"
kill $rendezvous
python three_sites.py --replay $roll
