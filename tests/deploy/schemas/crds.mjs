// Routes and the PodMonitor, from stdin as JSON, against the schemas of their published CRDs.
import {readFileSync} from "node:fs";
import {createRequire} from "node:module";

const require = createRequire(import.meta.url);
const gateway = "@kubernetes-models/gateway-api/gateway.networking.k8s.io";
const models = {
  HTTPRoute: require(`${gateway}/v1`).HTTPRoute,
  GRPCRoute: require(`${gateway}/v1alpha2`).GRPCRoute,  // the package has no later version; our fields are the same
  PodMonitor: (await import("@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor")).PodMonitor,
};
for (const manifest of JSON.parse(readFileSync(0, "utf8"))) {
  const model = models[manifest.kind];
  new model({...manifest, apiVersion: model.apiVersion}).validate();
  console.log(`${manifest.kind}: as its CRD has it (${model.apiVersion})`);
}
