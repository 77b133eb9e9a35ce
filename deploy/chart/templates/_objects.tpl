{{- define "antiphon.name" -}}
{{- $name := contains "antiphon" .Release.Name | ternary .Release.Name (printf "%s-antiphon" .Release.Name) -}}
{{- $name | trunc 53 | trimSuffix "-" -}}
{{- end }}

{{- define "antiphon.selector" -}}
app.kubernetes.io/name: antiphon
app.kubernetes.io/component: server
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "antiphon.labels" -}}
app.kubernetes.io/name: antiphon
app.kubernetes.io/part-of: antiphon
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}

{{/* The settings of the server as YAML: those of the base, and the values' over them. */}}
{{- define "antiphon.settings" -}}
{{- $settings := dict -}}
{{- range .Files.Lines "base/settings.env" -}}
{{- if and . (not (hasPrefix "#" .)) -}}
{{- $pair := splitn "=" 2 . -}}
{{- $_ := set $settings $pair._0 $pair._1 -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := .Values.settings -}}
{{- $_ := set $settings $name (toString $value) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end }}

{{/* A file of the chart as an object of this release: (list . "base/service.yaml"), as YAML. */}}
{{- define "antiphon.object" -}}
{{- $root := index . 0 -}}
{{- $object := $root.Files.Get (index . 1) | fromYaml -}}
{{- $labels := merge (include "antiphon.labels" $root | fromYaml) ($object.metadata.labels | default dict) -}}
{{- $_ := set $object.metadata "name" (include "antiphon.name" $root) -}}
{{- $_ := set $object.metadata "namespace" $root.Release.Namespace -}}
{{- $_ := set $object.metadata "labels" $labels -}}
{{- toYaml $object -}}
{{- end }}
